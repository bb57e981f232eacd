#!/usr/bin/env python
"""`./tools/train.py`: the same as `holdfast train`."""

import sys

from holdfast.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
