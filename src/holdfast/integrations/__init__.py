"""Parts of Holdfast inside other trainers."""
