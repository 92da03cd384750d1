"""A journal drawn as one self-contained HTML page."""
