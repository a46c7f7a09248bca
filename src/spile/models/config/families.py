"""Every family that is read, a row each (`rows`), and those that are refused with a reason."""

from spile.models.config.family import Family
from spile.models.config.rows.delta_nets import DELTA_NETS
from spile.models.config.rows.gemma import GEMMAS
from spile.models.config.rows.gpt_like import GPT_LIKE
from spile.models.config.rows.latent_attention import LATENT_ATTENTION
from spile.models.config.rows.llama_like import LLAMA_LIKE
from spile.models.config.rows.mixtures import MIXTURES
from spile.models.config.rows.state_spaces import STATE_SPACES

# Of rows with the same class, the first whose `when` holds is taken.
FAMILIES: tuple[Family, ...] = (
    *LLAMA_LIKE,
    *GPT_LIKE,
    *GEMMAS,
    *MIXTURES,
    *LATENT_ATTENTION,
    *DELTA_NETS,
    *STATE_SPACES,
)
_BY_CHANNEL = "its states decay by channel, which Spile does not compute"
_SPARSE_ATTENTION = "an indexer chooses the keys that each token sees, which Spile does not compute"
_SEVERAL_STREAMS = "its blocks update four streams at once, but a tap has one"
_ENCODER = "it is an encoder: its tokens see later tokens, but Spile's attention is causal"
# Classes of transformers that are refused with a reason; others are refused as unknown.
REFUSED = {
    "DeepseekV32ForCausalLM": _SPARSE_ATTENTION,
    "GlmMoeDsaForCausalLM": _SPARSE_ATTENTION,
    "DeepseekV4ForCausalLM": "tokens see compressed keys, some chosen by an indexer",
    "MambaForCausalLM": _BY_CHANNEL,
    "FalconMambaForCausalLM": _BY_CHANNEL,
    "Lfm2MoeForCausalLM": "its experts' weights are divided by a little more than their sum, which "
    "is not computed here",
    "Zamba2ForCausalLM": "its blocks share their weights, and read the embeddings once more",
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), _SEVERAL_STREAMS),
    **dict.fromkeys(
        (
            "BertModel",
            "BertForMaskedLM",
            "RobertaModel",
            "RobertaForMaskedLM",
            "ModernBertModel",
            "ModernBertForMaskedLM",
            "Gemma3TextModel",
        ),
        _ENCODER,
    ),
}
