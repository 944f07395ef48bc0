"""The emulated chip's assertions on a real one: ``make device``."""
