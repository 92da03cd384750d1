"""A live cluster under random kills and stops, judged by witnesses of its own: see ``__main__``."""
