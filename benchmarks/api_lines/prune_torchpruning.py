from given import read_images, read_network, tell

net, train, test = read_network(), read_images("train"), read_images("test")
# ---
import time

import torch
import torch_pruning as tp

example = torch.zeros(1, 3, 32, 32)
before, _ = tp.utils.count_ops_and_params(net, example)
pruner = tp.pruner.BasePruner(
    net,
    example,
    importance=tp.importance.GroupMagnitudeImportance(),
    pruning_ratio=0.8,
    iterative_steps=100,
    ignored_layers=[net.linear],
    round_to=8,
)
while tp.utils.count_ops_and_params(net, example)[0] > before / 1.4:
    pruner.step()
optimizer, ends = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9), time.time() + 60
while time.time() < ends:
    for images, labels in train:
        loss = torch.nn.functional.cross_entropy(net.train()(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if time.time() > ends:
            break
torch.save(net.eval(), "pruned.pt")
# ---
tell("a module with 1.4 times fewer multiplications: neither how right nor how fast it is")
