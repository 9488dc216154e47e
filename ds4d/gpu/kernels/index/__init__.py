"""The indexer: which compressed rows a row of a ratio-4 layer attends to (spec/model.md 4.8).

    score_s = sum_h w_h max(0, q_h . K_s),   w = (proj h) (heads dim)^-1/2,   s < (pos + 1) // 4
    chosen  = the top_k greatest scores, ties to the lowest row, ascending

`query` turns and rounds q, `score` meets the keys of the lane's pages, `choose` selects. A row of
the pass that sees no more than top_k keys attends to all of them, so all three skip it; a row like
an idle one. Where none is left, each block ends after one look at `pos`.

Where index rows are FP4, so are queries, and everything within a block of 32 channels is an
integer: codes count halves, times the block's power of two. A *level* vector is one whose powers
have been made equal without loss: each block's codes are shifted up by up to SHIFT_MOST places,
which int8 has room for, towards the least power of its blocks. Between level vectors the whole
product is one exact integer.
"""

SHIFT_MOST = 3  # 12 halves << 3 = 96, within int8
