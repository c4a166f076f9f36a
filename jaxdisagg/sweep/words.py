"""A sweep in words: the model in a line, and how a pair's page shards become each other's."""

from dataclasses import replace

from jaxdisagg.model_fit import ModelFit
from jaxdisagg.sweep.compute import active_parameters
from jaxdisagg.sweep.tables import count
from jaxdisagg.transfer_plan import TransferPlan


def headline(fit: ModelFit, name: str) -> str:
    """The model in a line: its cache and its parameters."""
    layout = fit.layout
    whole = replace(layout, tp=1, dp=1).token_bytes
    everything, met = active_parameters(fit)
    heads = f"{layout.kv_heads} KV heads of" if layout.kind == "gqa" else "a latent of"
    total, of_it = (count(n).replace("G", "B") for n in (everything, met))  # as people say it
    some = f" ({of_it} for a token)" if met < everything else ""
    return (
        f"{name}: {total} parameters{some}, {layout.layers} layers with {heads} "
        f"{layout.head_dim}, {fit.config.dtype}: {whole:,} cache bytes a token"
    )


def mapping(planned: TransferPlan) -> str:
    """In words how page shards become page shards, counted from a plan."""
    source, destination = planned.source, planned.destination
    ours, theirs = source.page_size, destination.page_size
    cut_pages = "" if ours == theirs else f"; pages of {ours} and {theirs} tokens are cut at both"
    writers = {
        rank: {u.source_rank for u in planned.units if u.destination_rank == rank}
        for rank in range(destination.tp)
    }
    readers = {
        rank: {u.destination_rank for u in planned.units if u.source_rank == rank}
        for rank in range(source.tp)
    }
    most = max(map(len, readers.values()))
    sending = sum(bool(found) for found in readers.values())
    if source.kind == "mla":
        ranks = (
            f"each of {destination.tp} decode ranks" if destination.tp > 1 else "the decode rank"
        )
        chosen = ", chosen by the seed" if sending < source.tp else ""
        return (
            f"MLA: {ranks} gets a copy of every latent page; {sending} of {source.tp} prefill "
            f"ranks send it{chosen}, {most} {'copies' if most > 1 else 'copy'} at most{cut_pages}"
        )
    parts = max(map(len, writers.values()))
    cut = len(source.heads_of(0)) // len(destination.heads_of(0))
    if parts > 1:
        said = [f"rebuilt: a decode rank's page comes in parts from {parts} prefill ranks"]
    elif cut > 1:
        said = [f"split: a prefill rank's page is cut by heads into {cut}"]
    else:
        said = ["a page's heads are the same on both sides"]
    if destination.replicas > 1:
        said.append(f"{destination.replicas} decode ranks get copies of the same heads")
    if source.replicas > 1:
        said.append(
            f"one of {source.replicas} prefill ranks with the same heads sends, by the seed"
        )
    return f"GQA: {'; '.join(said)}{cut_pages}"
