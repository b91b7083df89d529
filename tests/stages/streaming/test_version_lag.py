"""Samples that get too old while they are generated: flagged, cut, or begun anew."""

from __future__ import annotations
