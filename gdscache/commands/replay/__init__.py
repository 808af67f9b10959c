"""Replaying request traces on the index and the policies of a tier. Behind `gdscache replay`."""
