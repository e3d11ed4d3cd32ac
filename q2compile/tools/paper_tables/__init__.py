# SPDX-License-Identifier: Apache-2.0
"""`q2compile tables`: the papers' numeric tables that need no training, measured on this machine.

schemes.py      what each 4-bit scheme does to N(0,1): error, effective bits, alignment
gradients.py    recipes: one linear layer; the error of the mean gradient of many draws
paper.py        the published figures, each with its source
output.py       text, CSV, JSON and a plot
command.py      the subcommand
"""
