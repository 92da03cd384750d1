"""What is on this node: its devices and who uses them (``survey``, ``nvml``, ``surveyor``), which processes
there are and whose (``procfs``, ``cgroups``). Reads only; knows no jobs, groups or backends.
"""
