"""Adapters for RL frameworks, one module each. They import the client only, and the framework only when it is
in use already; without an orchestrator in the environment they do nothing.
"""
