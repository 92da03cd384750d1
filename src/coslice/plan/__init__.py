"""Which jobs should share which accelerators: predictions, the search, and what it says to people.

Called by ``coslice plan`` and by admission. Knows profiles; knows nothing of locks, wires and processes.
"""
