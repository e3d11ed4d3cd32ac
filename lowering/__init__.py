"""Inductor lowerings of the q2 ops: which kernel each becomes and what fuses into it."""
