"""What a checkpoint can hold and what its engine runs: rules that a plan asks before any work. No torch here.

vLLM's are those of its compressed-tensors and GPTQ loaders (Marlin kernels: 4 and 8 bits, groups of 32, 64, 128 or a
whole row); its newest versions take more where the Humming kernels are built, which is not counted on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from compress.facts import LayerFacts, ModelFacts, Note, Structure
from compress.formats.schemes import KvScheme, Scheme
from compress.formats.targets import FUSED, TARGETS
from compress.passes.kv_cache import attentions
from compress.recipe.exports import CheckpointExport

GROUPS = (-1, 32, 64, 128)
"""Group sizes that vLLM has kernels for; -1: a scale a row."""
W4AFP8_GROUP = 128
"""Of vLLM's CUTLASS kernel, which compute capability 9.0 alone has."""
GPTQ_BITS, AWQ_BITS, AWQ_OUTPUTS = (2, 3, 4, 8), 4, 8


def checkpoint_problems(
    facts: ModelFacts,
    schemes: Mapping[str, Scheme],
    export: CheckpointExport,
    target: str = "transformers",
    kv_cache: KvScheme | None = None,
) -> list[str]:
    """Return why a model with these schemes cannot be written, or loaded by `target`: sentences that name layers.

    `schemes`: layer -> what it is stored as; layers that it lacks stay float.
    """
    layers = {layer.name: layer for layer in facts.layers}
    problems = []
    for name, scheme in schemes.items():
        layer = layers[name]
        problem = layer_problem(name, layer.type, layer.shape, scheme, export.format)
        problems += [problem] if problem else []
    problems += find_tied_problems(facts, schemes)
    problems += _find_expert_problems([layer.name for layer in facts.layers], schemes)
    if TARGETS[target].needs_floats and (name := next((n for n in schemes if layers[n].unpackable), "")):
        why = "experts in one tensor, or a weight that the model's own code sets or reads"
        said = f"{target} reads it as floats alone ({why}); ignore it, or set the export's target: vllm"
        problems.append(f"{name}: {said}")
    if export.format in ("gptq", "awq"):
        problems += _find_single_scheme_problems(export.format.upper(), schemes, kv_cache)
    if export.format == "awq":
        problems += _find_awq_names(list(layers), schemes)
    if export.format == "compressed-tensors" and target == "transformers":
        problems += _find_transformers_problems(schemes, _find_embeddings(facts.layers, schemes))
    if target == "vllm":
        problems += vllm_problems(facts.layers, facts.structure, schemes, export, kv_cache)
    return problems


def checkpoint_notes(
    facts: ModelFacts,
    schemes: Mapping[str, Scheme],
    export: CheckpointExport,
    target: str = "transformers",
    kv_cache: KvScheme | None = None,
) -> list[Note]:
    """Return what the user should know of such a checkpoint, though it can be written."""
    notes = []
    if target != "vllm" and (refused := vllm_problems(facts.layers, facts.structure, schemes, export, kv_cache)):
        more = f" (and {len(refused) - 1} more like it)" if len(refused) > 1 else ""
        notes.append(Note("info", f"vLLM would not load this checkpoint: {refused[0]}{more}"))
    if export.format in ("gptq", "awq"):
        name = export.format.upper()
        notes.append(Note("info", f"transformers loads {name} checkpoints where gptqmodel is installed"))
        return notes
    if small := sorted({scheme.name for scheme in schemes.values() if scheme.weights.scales != "float"}):
        text = f"{', '.join(small)}: transformers unpacks such weights into bfloat16; load it with dtype=torch.bfloat16"
        notes.append(Note("warning" if export.dtype in ("float32", "float16") else "info", text))
    # widths that compressed-tensors packs without gaps since 0.18, and other than that before it
    dense = sorted({scheme.weights.bits for scheme in schemes.values()} & {3, 5, 6, 7})
    if dense:
        bits = ", ".join(map(str, dense))
        notes.append(Note("info", f"weights of {bits} bits are read by compressed-tensors 0.18 and later"))
    if any(".experts." in layer.name and not layer.unpackable for layer in facts.layers if layer.name in schemes):
        text = "experts are stored one by one, as vLLM reads them; transformers dequantizes and stacks them as it loads"
        notes.append(Note("info", text))
    looked_up = _find_embeddings(facts.layers, schemes)
    if looked_up:
        text = "transformers loads it with CompressedTensorsConfig(dequantize=True) alone"
        notes.append(Note("warning", f"{format_names(looked_up)}: embeddings in few bits: {text}"))
    elif len(set(schemes.values())) > 1:
        text = "load it as it is: transformers' dequantize=True takes the first scheme for every layer"
        notes.append(Note("warning", f"layers have {len(set(schemes.values()))} schemes; {text}"))
    elif any(_has_packed_zeros(scheme) for scheme in schemes.values()):
        text = "zero points are packed, which transformers loads with CompressedTensorsConfig(dequantize=True) alone"
        notes.append(Note("warning", text))
    return notes


def scoring_gaps(structure: Structure | None, kv_cache: KvScheme | None, engine: str) -> list[str]:
    """Return what `engine` computes otherwise than a checkpoint can be scored, as sentences that name modules.

    Gates on quality are undecided then. Scoring rounds keys and values where an attention module computes with them.
    """
    if structure is None or kv_cache is None:
        return []
    blocks = {block.name for block in structure.blocks}
    sources = {layer: input_group.source for input_group in structure.input_groups for layer in input_group.layers}
    gaps = []
    for attention, input_group in attentions(structure.input_groups).items():
        if attention in blocks:
            name = attention or "the model"
            gaps.append(f"{name}: attention has no module of its own, in which its {kv_cache} cache could be scored")
        elif engine == "vllm" and sources.get(input_group.source, "").startswith(f"{attention}."):
            # keys and values that are projected out of a latent: vLLM caches and rounds the latent
            gaps.append(f"{attention}: {engine} keeps the latent in {kv_cache} of which keys and values are projected")
    return gaps


def layer_problem(name: str, kind: str, shape: tuple[int, ...], scheme: Scheme, form: str) -> str:
    """Return why `form` (compressed-tensors, gptq, awq) cannot hold a layer of this type and shape [out, in], or ""."""
    weights = scheme.weights
    if form == "awq":
        return _find_awq_problem(name, kind, shape, scheme)
    if form == "compressed-tensors":
        if kind == "Embedding":
            if scheme.activations is not None or weights.kind != "int" or weights.scales != "float":
                return f"{name} is an embedding, and compressed-tensors' readers look up integers alone; use W4 or W8"
        elif kind != "Linear":
            way = "ignore it, or use format: gptq" if kind == "Conv1D" else "ignore it"
            return f"{name} is a {kind}, which compressed-tensors has no layer for; {way}"
        if not weights.symmetric and weights.group_size == 0:
            return f"{name}: compressed-tensors packs no zero point for a whole tensor; use group_size: -1"
    elif kind == "Embedding":
        return f"{name} is an embedding, which the GPTQ format has no layer for; leave embeddings out, or " + _OTHER
    elif kind not in ("Linear", "Conv1D"):
        return f"{name} is a {kind}, which the GPTQ format has no layer for; ignore it"
    elif scheme.activations is not None or weights.kind != "int" or weights.bits not in GPTQ_BITS:
        return f"{name} is {scheme.name}, and the GPTQ format holds weights alone, in 2, 3, 4 or 8 bits; " + _OTHER
    elif weights.group_size == 0:
        return f"{name} has one scale for the whole tensor, and the GPTQ format has one for each row; " + _OTHER
    elif any(size * weights.bits % 32 for size in shape):
        return f"{name} is {list(shape)}, and {weights.bits}-bit rows and columns do not fill 32-bit words; " + _OTHER
    if weights.group_size > 0 and shape[1] % weights.group_size:
        return f"{name} has {shape[1]} inputs, which group_size {weights.group_size} does not divide"
    return ""


_OTHER = "use format: compressed-tensors"


def find_tied_problems(facts: ModelFacts, schemes: Mapping[str, Scheme]) -> Iterator[str]:
    """Yield a sentence on each embedding that is quantized while the output layer that shares its weight is not."""
    owners = {layer.weight: layer.name for layer in facts.layers if layer.weight == f"{layer.name}.weight"}
    for layer in facts.layers:
        owner = owners.get(layer.weight, layer.name)
        if owner in schemes and layer.name not in schemes:
            yield f"{owner} is quantized and shares its weight with {layer.name}, which is not; ignore it, or take both"


def _find_expert_problems(names: Iterable[str], schemes: Mapping[str, Scheme]) -> Iterator[str]:
    """Yield a sentence on each mixture whose experts differ in scheme: all engines run them as one."""
    mixtures: dict[str, list[str]] = {}
    for name in names:
        if ".experts." in name:
            mixtures.setdefault(name.partition(".experts.")[0] + ".experts", []).append(name)
    for mixture, members in mixtures.items():
        if differences := _format_differences(mixture, members, schemes):
            yield f"{mixture}: engines run all experts as one, with one scheme ({differences}); give them the same"


def _find_embeddings(layers: Iterable[LayerFacts], schemes: Mapping[str, Scheme]) -> list[str]:
    """Return the embeddings that are looked up in few bits."""
    return [layer.name for layer in layers if layer.name in schemes and layer.type == "Embedding"]


def transformers_lacks(schemes: Mapping[str, Scheme], embeddings: Sequence[str] = ()) -> str:
    """Return why transformers cannot read a checkpoint with these schemes; "" where it can.

    `embeddings`: those of the layers that are looked up.
    """
    return next(_find_transformers_problems(schemes, embeddings), "")


def _find_transformers_problems(schemes: Mapping[str, Scheme], embeddings: Sequence[str]) -> Iterator[str]:
    """Yield what transformers 5.23 with compressed-tensors 0.20 fails on, found by loading such checkpoints."""
    if embeddings and len(set(schemes.values())) > 1:
        listed = ", ".join(dict.fromkeys(map(_format_scheme, schemes.values())))
        yield (
            f"{embeddings[0]}: transformers loads embeddings in few bits by one scheme for all layers, and there are "
            f"several ({listed}); give embeddings the others' scheme, or leave embeddings out"
        )
        return
    if len(set(schemes.values())) > 1:
        for name, scheme in schemes.items():
            if _has_packed_zeros(scheme):
                yield f"{name} is {scheme.name} in a model of several schemes, which transformers cannot load; use one"
                return
    experts = {scheme: name for name, scheme in schemes.items() if ".experts." in name}
    if len(experts) > 1:
        listed = "; ".join(map(_format_scheme, experts))
        yield f"experts of {len(experts)} schemes ({listed}): transformers reads one; use one"
    for scheme, name in experts.items():
        weights, inputs = scheme.weights, scheme.activations
        grouped = weights.kind == "float" and weights.group_size > 0
        if not weights.symmetric or grouped or (inputs is not None and weights.kind == "int"):
            yield f"{name} is {scheme.name}, which transformers cannot stack; use symmetric weights alone, or FP8"


def _has_packed_zeros(scheme: Scheme) -> bool:
    return not scheme.weights.symmetric and scheme.activations is None


def _find_single_scheme_problems(form: str, schemes: Mapping[str, Scheme], kv_cache: KvScheme | None) -> Iterator[str]:
    distinct = sorted({_format_scheme(scheme) for scheme in schemes.values()})
    if not distinct:
        yield f"nothing is quantized, and the {form} format is for quantized weights; " + _OTHER
    if len(distinct) > 1:
        yield f"layers have different schemes ({'; '.join(distinct)}), and the {form} format has one; " + _OTHER
    if kv_cache is not None:
        yield f"the {form} format has no place for an {kv_cache} KV cache; " + _OTHER


def _find_awq_problem(name: str, kind: str, shape: tuple[int, ...], scheme: Scheme) -> str:
    weights = scheme.weights
    if kind != "Linear":
        return f"{name} is a {kind}, which the AWQ format has no layer for; ignore it"
    if scheme.activations is not None or weights.kind != "int" or weights.bits != AWQ_BITS:
        return f"{name} is {scheme.name}, and the AWQ format holds weights alone, in 4 bits; " + _OTHER
    if weights.group_size == 0:
        return f"{name} has one scale for the whole tensor, and the AWQ format has one for each row; " + _OTHER
    if shape[0] % AWQ_OUTPUTS:
        return f"{name} has {shape[0]} outputs, which do not fill words of eight; ignore it"
    if weights.group_size > 0 and shape[1] % weights.group_size:
        return f"{name} has {shape[1]} inputs, which group_size {weights.group_size} does not divide"
    return ""


def _find_awq_names(layers: Iterable[str], schemes: Mapping[str, Scheme]) -> Iterator[str]:
    """Yield a sentence on each float layer whose name is a part of a quantized one's: readers leave both out."""
    for name in (name for name in layers if name not in schemes):
        if taken := next((other for other in schemes if name in other), None):
            yield f"{name} stays float, and readers of the AWQ format leave out {taken}, too, by its name; " + _OTHER


def vllm_problems(
    layers: Sequence[LayerFacts],
    structure: Structure | None,
    schemes: Mapping[str, Scheme],
    export: CheckpointExport,
    kv_cache: KvScheme | None = None,
) -> list[str]:
    """Return why vLLM could not load such a checkpoint, as sentences that name layers."""
    shapes = {layer.name: layer.shape for layer in layers}
    problems = []
    for name, scheme in schemes.items():
        if problem := _find_kernel_problem(scheme, shapes[name], export.format):
            problems.append(f"{name}: vLLM {problem}")
    problems += _find_lookup_problems(layers, schemes)
    problems += _find_fused_problems(shapes, structure, schemes)
    if kv_cache == "int8":
        problems.append("kv_cache: vLLM has an fp8 cache and no int8 one; use fp8")
    return problems


def _find_kernel_problem(scheme: Scheme, shape: tuple[int, ...], form: str) -> str:
    weights, inputs = scheme.weights, scheme.activations
    if weights.kind == "float" and (weights.scales != "float" or weights.rows > 1):
        return ""  # it pads what its kernels' tiles do not divide; fused layers of FP8_BLOCK have a rule of their own
    if inputs is not None and (weights.kind, inputs.kind) == ("int", "float"):
        if weights.group_size != W4AFP8_GROUP or any(size % W4AFP8_GROUP for size in shape):
            where = f"group_size {weights.group_size} and sizes {list(shape)}"
            return f"runs {scheme.name} in groups of {W4AFP8_GROUP} and sizes that these divide, not {where}; ignore it"
        return ""
    if weights.kind == "float":
        return "takes FP8 weights with a scale for each row or one for the tensor" if weights.group_size > 0 else ""
    if inputs is not None and not weights.symmetric:
        return "takes symmetric weights alone where inputs are in 8 bits; set symmetric: true"
    if inputs is not None and weights.bits == 8:
        return "takes W8A8 weights with a scale for each row; set group_size: -1" if weights.group_size > 0 else ""
    if inputs is not None and (weights.bits != 4 or not inputs.dynamic):
        return f"has no kernel for {scheme.name}; W8A8 and W4A8 are run"
    if weights.bits not in (4, 8):
        return f"has no kernel for {weights.bits}-bit weights; 4 and 8 bits are run"
    if form == "gptq" and not weights.symmetric:
        return "runs symmetric GPTQ weights alone; use format: compressed-tensors"
    if weights.group_size not in GROUPS:
        return f"has no kernel for group_size {weights.group_size}; use 32, 64, 128 or -1 (one scale for each row)"
    if any(size * weights.bits % 32 for size in shape):
        return f"needs sizes that fill 32-bit words, and it is {list(shape)}; ignore it"
    return ""


def _find_lookup_problems(layers: Sequence[LayerFacts], schemes: Mapping[str, Scheme]) -> Iterator[str]:
    """Yield why vLLM could not look embeddings up in few bits; read in its source, 0.32."""
    for layer in layers:
        if layer.type == "Embedding" and layer.name in schemes:
            if any(other.weight == layer.weight and other.name != layer.name for other in layers):
                yield (
                    f"{layer.name}: vLLM cannot share embeddings in few bits with the output layer; leave embeddings "
                    "and lm_head out, or use ignore: [] for an output layer of its own"
                )
            elif not schemes[layer.name].weights.symmetric:
                yield f"{layer.name}: vLLM looks up symmetric integers alone; use W4 or W8"


def _find_fused_problems(
    shapes: Mapping[str, tuple[int, ...]], structure: Structure | None, schemes: Mapping[str, Scheme]
) -> Iterator[str]:
    """Yield a sentence on each fused layer whose members differ in scheme, or share blocks: vLLM runs them as one."""
    input_groups = structure.input_groups if structure is not None else ()
    source = {name: i for i, input_group in enumerate(input_groups) for name in input_group.layers}
    fused: dict[tuple[str, tuple[str, ...], int], list[str]] = {}
    for name in shapes:
        parent, _, leaf = name.rpartition(".")
        for together in FUSED:
            if leaf in together and ".experts." not in name:
                fused.setdefault((parent, together, source.get(name, -1)), []).append(name)
    for (parent, _, _), members in fused.items():
        if differences := _format_differences(parent, members, schemes):
            yield f"{parent}: vLLM runs these layers as one, with one scheme ({differences}); give them the same"
            continue
        rows = schemes[members[0]].weights.rows if members[0] in schemes else 1
        for name in members[:-1]:  # the last one's blocks may end with it
            if shapes[name][0] % rows:
                text = f"{name} has {shapes[name][0]} outputs, which its blocks of {rows} do not divide"
                yield f"{parent}: vLLM runs these layers as one, and {text}; use scheme: FP8_DYNAMIC, or ignore them"


def _format_differences(parent: str, members: Iterable[str], schemes: Mapping[str, Scheme]) -> str:
    """Return which layers have which scheme, of those that must have one in common; "" where they do."""
    layers: dict[str, list[str]] = {}
    for name in members:
        scheme = _format_scheme(schemes[name]) if name in schemes else "float"
        layers.setdefault(scheme, []).append(name.removeprefix(f"{parent}."))
    if len(layers) < 2:
        return ""
    return "; ".join(f"{format_names(short, 4)}: {scheme}" for scheme, short in layers.items())


def _format_scheme(scheme: Scheme) -> str:
    group, rows = scheme.weights.group_size, scheme.weights.rows
    groups = f"blocks of {rows} x {group}" if rows > 1 else f"group {group}"
    return f"{scheme.name}, " + {0: "one scale", -1: "per row"}.get(group, groups)


def format_names(names: list[str], most: int = 10) -> str:
    """Join names, and count those beyond `most`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
