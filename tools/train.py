#!/usr/bin/env python
"""The original command line: the same as `holdfast train`."""

import sys

from holdfast.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
