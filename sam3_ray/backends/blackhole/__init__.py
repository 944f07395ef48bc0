"""Tenstorrent Blackhole chips through ttnn."""
