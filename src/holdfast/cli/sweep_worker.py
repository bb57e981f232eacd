"""The process of a worker of `holdfast sweep`."""

from holdfast.cli.allocator import keep_freed_memory
from holdfast.sweep.worker import main

if __name__ == "__main__":
    keep_freed_memory()
    main()
