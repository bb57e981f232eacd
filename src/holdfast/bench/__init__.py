"""Speed and correctness of memory cells, compared with torch's dense call without resets."""
