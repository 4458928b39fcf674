"""How a torch model is made, found by running it once: blocks, readings, sources of scales, the residual stream."""
