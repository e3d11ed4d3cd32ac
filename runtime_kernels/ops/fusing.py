"""What the pass fuse_rotations tells the lowerings of one graph."""

# A key of a quantiser's node.meta: it may compute its operand. Its value is a list, to which the
# lowering adds what it was fused with, or why it was not.
MAY_FUSE = "q2_may_fuse"
