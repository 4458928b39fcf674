from given import read_images, read_network, tell

net, train, test = read_network(), read_images("train"), read_images("test")
# ---
import compress

result = compress.quantize(net, "INT8", calibration_dataset=train, eval_dataset=test)
# ---
tell(result)
