"""Tests share the helpers of this folder: having a conftest here puts it on the path."""
