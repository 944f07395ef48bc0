"""Upstream's modules on the CPU."""
