"""Inductor lowerings of the q2 ops: none yet, Inductor calls each op as an extern kernel."""
