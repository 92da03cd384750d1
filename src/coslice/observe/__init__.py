"""What a running process shows of itself: metrics, health, traces, one log line per decision.

Used by orchestrator and agent alike, and by the command line that serves it over HTTP. Nothing is decided
from it, and nothing here knows the lock or the devices: the apps say what there is to see.
"""
