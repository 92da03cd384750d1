"""Where an agent learns which groups its node serves and whose its processes are, if nobody tells it on the
command line. One file each: Kubernetes (labels of its node and that node's pods), Slurm (the step that it
runs in). Agents declare; the orchestrator asks nobody.
"""
