"""Ways to move state. ``base.Backend`` is the contract; each backend is one module here or an installed
one.
"""
