# SPDX-License-Identifier: Apache-2.0
"""`export`: a trained model as an inference checkpoint of the codes that its forward multiplies.

    traced.py        which weights the backend takes, in which scheme and dtype
    places.py        where the matrix of a matmul is in its parameter
    codes.py         the codes of a weight, and common global scales
    formats.py       what each format stores, under which names
    names.py         the names that Hugging Face's loaders expect
    shards.py        files that appear whole or not at all
    write.py         layer by layer into them, and the JSON files beside them
    ranks.py         work that one rank does for all that export the same model
    options.py       the options that a model was trained with
    export.py        all of it, in order, and the command

May import what the rest of `tools` may.
"""
