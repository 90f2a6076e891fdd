"""What programs beside the decoder build on, as `ts_eval` and `heads_train` do: names that stay when files inside move.

Those that users need are in `decoder` itself. Public, too, are `decoder.auditing`, `decoder.collecting`,
`decoder.drafters`, `decoder.heads`, `decoder.options` and `decoder.timings`; all other modules are the decoder's own.
What a name is stands where it is defined.
"""

# ruff: noqa: F401

from decoder.arguments import check_arguments
from decoder.assistant.model import AssistantModel
from decoder.backends.memory import available_memory
from decoder.backends.native import library as native
from decoder.backends.transfers import download
from decoder.cache.argument import cache_named
from decoder.cache.draft_layer import DraftLayerCache
from decoder.cache.form import CacheForm
from decoder.cache.full import FullCache
from decoder.cache.partial import PartialCache
from decoder.cache.rounding import rounding_cache
from decoder.cache.window import window_slots
from decoder.checks import check, decoded, meant, meant_beside, parse_json, shown
from decoder.cli.continuation import stream_on
from decoder.cli.journal import Journal, damaged, named, whole_lines
from decoder.dflash.draft_model import DFlashDraftModel
from decoder.draft_heads import DraftHead
from decoder.draft_layer import DraftLayer, RepeatedLayer, attend
from decoder.drafters.draft_vocabulary import DraftVocabulary
from decoder.drafters.tuning.cost_tuned import CostTuned
from decoder.eagle3.checkpoint import LAYOUTS, save_draft_model
from decoder.eagle3.config import Eagle3Config
from decoder.eagle3.draft_model import KIND as EAGLE3
from decoder.eagle3.draft_model import Eagle3DraftModel
from decoder.heads_beside import heads_beside
from decoder.heads_files import CONFIG, is_repository, read_json
from decoder.jobs.on_ray import Cluster
from decoder.jobs.texts import Manner, Text, write_texts
from decoder.loader import DTYPES, device_named
from decoder.model import loading
from decoder.model.architectures import layer_kinds, refuse_unsupported
from decoder.model.gguf import is_gguf, open_checked
from decoder.model.loading import check_source, empty_model, out_of_memory, read_config, read_model, read_tokenizer
from decoder.model.options import layer_configs
from decoder.model.quantising import QUANTISED_DTYPES, dtype_around, dtype_name, quantise, quantised_bytes
from decoder.model.target import Target
from decoder.parallel.ranks import ending_in_words, is_first_to_tell, join, linked
from decoder.parallel.sharding import refuse_unshareable, shared_parameters
from decoder.request import GenerationRequest
from decoder.sampling.sampler import Sampler
from decoder.sampling.token_tree import TokenTree, rank_paths
from decoder.text.prompts import chat_ids, is_chat, text_ids
from decoder.text.stops import eos_ids
from decoder.text.stream import TextStream
from decoder.yaml_text import parse_yaml
