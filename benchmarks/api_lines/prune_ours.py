from given import read_images, read_network, tell

net, train, test = read_network(), read_images("train"), read_images("test")
# ---
import compress

result = compress.prune(net, speedup=1.4, train_dataset=train, eval_dataset=test, max_seconds=60)
smaller = result.torch()
# ---
tell(result)
