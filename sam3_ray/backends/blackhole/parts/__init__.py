"""The model's parts in ttnn, one file each, named as upstream's."""
