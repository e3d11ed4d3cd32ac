# SPDX-License-Identifier: Apache-2.0
"""Pre-training of small Llamas, recipe beside recipe: the parts that `examples/train_llama.py` and
`examples/pretrain.py` are made of.

    model      sizes, the Llama
    text       documents out of files, tokenizers
    corpus     a token file: built once, read through a memory map
    batches    which tokens a step sees, and bringing them to the device
    runs       what is compared: recipes with their options, by name
    training   the loop of one run
    comparison runs x seeds in one folder, from the same weights on the same batches
    checkpoint what a run goes on from, to the bit
    record     what a run leaves behind: a row a step, a result
    results    tables and curves over runs
    gaps       the statistics: gaps paired by seed, their standard errors
    branching  the BF16 training state that the branched runs of a seed start from
    plan       what `train` is asked for, by its command line or a plan in TOML
    page       the pages with the results
    devices    one process a device, each with the next run
    throughput the loop beside the bare compiled step
    stability  one seed in ways that should be one: where the losses differ
    oracle     a run of torch references in fp32
    operands   the error of each operand on a run's own tensors
"""
