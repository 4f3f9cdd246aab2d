"""Ranks of Moxie in the processes of a torch.distributed group.

    keys = {..., **rank_keys(dist.get_world_size(), dist.get_rank())}
    experts = Experts(load(path), keys, all_gather=all_gather_of(dist.group.WORLD))
"""

import datetime

TIMEOUT_S = 300  # what others may do before they come: read weights, compile
ROUND_ROWS = 1 << 15  # that a rank may get at once; more go in rounds, or buffers grow with ranks


def rank_keys(ranks, rank):
    """What a configuration says of ranks with tokens of their own each, as with data parallel
    attention."""
    return {"ep_size": ranks, "tp_size": ranks, "dp_size": ranks, "ep_rank": rank}


def exchange_keys(ranks, rank, tokens_max, is_fp8):
    """The same of ranks that an engine has started: what Moxie's dispatcher has to know.

    tokens_max: of one rank in a forward. is_fp8: rows are multiplied as fp8, by a GPU; then they
    are that on the way, too, which halves them and leaves the bits as they are.
    """
    return {**rank_keys(ranks, rank), "dispatch_format": "fp8_block128" if is_fp8 else "input",
            "forward_tokens_max": tokens_max, "timeout_ms": 1000 * TIMEOUT_S,
            "dispatch_rounds_max": -(-tokens_max * ranks // ROUND_ROWS)}


def all_gather_of(group, timeout_s=TIMEOUT_S):
    """The all_gather of moxie.Experts over a torch.distributed group that moves tensors of the CPU
    (gloo).

    It is used while an Experts is made, by all ranks of the group at once. Where one does not come
    within timeout_s seconds, the others raise what torch.distributed raises.
    """
    import torch  # rank_keys goes without
    import torch.distributed as dist
    ranks, limit = dist.get_world_size(group), datetime.timedelta(seconds=timeout_s)

    def all_gather(data):
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(found, mine, group=group, async_op=True).wait(limit)
        return b"".join(bytes(each.numpy()) for each in found)

    all_gather.group = group
    return all_gather
