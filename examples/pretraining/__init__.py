"""Pre-training of small Llamas, recipe beside recipe: the parts that `examples/train_llama.py` and
`examples/pretrain.py` are made of.

    model      sizes, the Llama
    text       documents out of files, tokenizers
    corpus     a token file: built once, read through a memory map
    batches    which tokens a step sees, and bringing them to the device
    runs       what is compared: recipes with their options, by name
    training   the loop of one run
    checkpoint what a run goes on from, to the bit
    record     what a run leaves behind: a row a step, a result
    results    tables and curves over runs
    gaps       the statistics: gaps paired by seed, their standard errors
    page       the page with the results
    devices    one process a device, each with the next run
"""
