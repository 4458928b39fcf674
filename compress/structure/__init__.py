"""How a torch model is made, found by running it once: blocks, input groups, sources of scales, the residual stream."""
