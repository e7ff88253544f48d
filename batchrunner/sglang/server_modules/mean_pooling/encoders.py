"""SGLang encoders with mean pooling. Each class has the name of the architecture that it replaces."""

from typing import Any

from sglang.srt.layers.pooler import Pooler, PoolingType
from sglang.srt.models import bert, roberta


class BertModel(bert.BertModel):  # type: ignore[misc]
    """BERT with the mean over all tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pooler = Pooler(pooling_type=PoolingType.MEAN, normalize=True)


class XLMRobertaModel(roberta.XLMRobertaModel):  # type: ignore[misc]
    """XLM-RoBERTa with the mean over all tokens."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.pooler = Pooler(pooling_type=PoolingType.MEAN, normalize=True)


EntryClass = [BertModel, XLMRobertaModel]
