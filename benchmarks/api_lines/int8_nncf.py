from given import read_images, read_network, tell

net, train, test = read_network(), read_images("train"), read_images("test")
# ---
import nncf
import openvino
import torch

quantized = nncf.quantize(net, nncf.Dataset(train, lambda item: item[0]), subset_size=8)
openvino.save_model(openvino.convert_model(quantized, example_input=torch.zeros(1, 3, 32, 32)), "int8.xml")
# ---
tell("a file: neither how right nor how fast it is")
