"""A torch model that stays in its files, and the stream that hands it to passes block by block."""
