"""The model written out from the equation alone: y = N_post(a x + b N_out(S(c N_in(x)))), in plain operators."""

import math

import torch

NORMS_OF = {  # written from the equation's names, not from the model's table
    "none": "",
    "pre": "in",
    "post": "post",
    "output": "out",
    "sandwich": "in out",
    "keel": "in post",
    "out_post": "out post",
    "all": "in out post",
}
PATTERNS = {  # for the four branches of two layers
    "post*2 sandwich pre": ["post", "post", "sandwich", "pre"],
    "none keel out_post all": ["none", "keel", "out_post", "all"],
    "attn:post mlp:none": ["post", "none", "post", "none"],
    "pre output*3": ["pre", "output", "output", "output"],
}


def placements_of(config) -> list[set[str]]:
    names = PATTERNS.get(config.placement, [config.placement] * 2 * config.n_layer)
    return [set(NORMS_OF[name].split()) for name in names]


def standardize(x, weights, name, config):
    """What a norm multiplies by its gain."""
    if config.norm == "none":
        return x
    if config.norm == "dyt":
        return torch.tanh(weights[f"{name}.alpha"] * x)
    if config.norm == "derf":
        return torch.erf(weights[f"{name}.alpha"] * x + weights[f"{name}.shift"])
    if config.norm == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt()


def normalize(x, weights, name, config, gain=True):
    y = standardize(x, weights, name, config)
    if gain and config.norm != "none" and config.gain != "none":
        y = y * (weights[f"{name}.weight"] + (1 if config.gain == "zero_centred" else 0))
    return y + weights.get(f"{name}.bias", 0.0)


def rotate(x, theta):
    """Complex multiplication of feature pairs (j, j + d/2) by exp(i t theta^(-2j/d))."""
    time, width = x.shape[1], x.shape[-1]
    pair = torch.complex(x[..., : width // 2], x[..., width // 2 :])
    rate = theta ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    angle = torch.arange(time, dtype=torch.float64)[:, None] * rate
    turned = pair * torch.polar(torch.ones_like(angle), angle)[None, :, None, :]
    return torch.cat((turned.real, turned.imag), -1)


def linear(x, weights, name):
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def attention(x, weights, name, config):
    batch, time, _ = x.shape
    heads, groups = config.n_head, config.n_kv_head or config.n_head
    width = config.head_dim or config.n_embd // heads
    qkv = linear(x, weights, f"{name}.qkv")
    q, k, v = qkv.split([heads * width, groups * width, groups * width], -1)
    if config.qk_norm == "full":
        q = normalize(q, weights, f"{name}.q_norm", config)
        k = normalize(k, weights, f"{name}.k_norm", config)
    q, k, v = (t.reshape(batch, time, -1, width) for t in (q, k, v))
    if config.qk_norm == "head":
        q = normalize(q, weights, f"{name}.q_norm", config)
        k = normalize(k, weights, f"{name}.k_norm", config)
    if config.v_norm:
        v = normalize(v, weights, f"{name}.v_norm", config, gain=False)
    if config.pos == "rope":
        q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
    mixed = []
    for h in range(heads):
        g = h // (heads // groups)
        scores = q[:, :, h] @ k[:, :, g].transpose(1, 2) / math.sqrt(width)
        scores = scores.masked_fill(torch.ones(time, time, dtype=torch.bool).triu(1), -math.inf)
        mixed.append(scores.softmax(-1) @ v[:, :, g])
    return linear(torch.cat(mixed, -1), weights, f"{name}.out")


def tanh_gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(x, weights, name, config):
    up = linear(x, weights, f"{name}.up")
    if config.mlp in ("swiglu", "geglu"):
        gate = linear(x, weights, f"{name}.gate")
        active = gate * torch.sigmoid(gate) if config.mlp == "swiglu" else tanh_gelu(gate)
        return linear(active * up, weights, f"{name}.down")
    active = 0.5 * up * (1 + torch.erf(up / math.sqrt(2))) if config.mlp == "gelu" else tanh_gelu(up)
    return linear(active, weights, f"{name}.down")


def textbook(weights, config, tokens, factors):
    """Logits [B, T, V] for factors (a, b, c) of every branch."""
    x = weights["embed.weight"][tokens]
    x = x * (math.sqrt(config.n_embd) if config.embed_scale == "sqrt_dim" else config.embed_scale)
    if config.pos == "learned":
        x = x + weights["pos_embed.weight"][: tokens.shape[1]]
    if config.embed_norm:
        x = normalize(x, weights, "embed_norm", config)
    norms = placements_of(config)
    for i, (a, b, c) in enumerate(factors):
        h = x
        if "in" in norms[i]:  # N_in of a branch is stored with the join below it
            h = c * normalize(x, weights, f"joins.{i - 1}.next_norm" if i else "entry", config)
        s = (mlp if i % 2 else attention)(h, weights, f"branches.{i}", config)
        if "out" in norms[i]:
            s = normalize(s, weights, f"joins.{i}.out_norm", config)
        x = a * x + b * s
        if "post" in norms[i]:
            x = normalize(x, weights, f"joins.{i}.post_norm", config)
    if "post" not in norms[-1]:
        x = normalize(x, weights, f"joins.{len(norms) - 1}.next_norm", config)
    logits = x @ weights.get("head.weight", weights["embed.weight"]).T
    cap = config.logit_softcap
    return cap * torch.tanh(logits / cap) if cap else logits
