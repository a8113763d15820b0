"""From a row to the text that a model completes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from eagle_batch.data.chat import ChatTemplate, model_folder
from eagle_batch.data.templates import StageTemplate, compile_stages
from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class Prompter:
    """Renders the prompts of every stage of one pipeline."""

    stages: tuple[StageTemplate, ...]
    #: None where no stage has messages.
    chat: ChatTemplate | None

    def adds_special_tokens(self, stage: int) -> bool:
        """Whether the tokenizer adds its special tokens; a chat template has written its own."""
        return not self.stages[stage].is_chat

    def render(self, stage: int, values: Mapping[str, object]) -> str:
        """Return the prompt of one row; `values` are its columns and the texts of earlier stages.

        Raises RequestError where the row's values make no prompt.
        """
        template = self.stages[stage]
        messages = template.render(values)
        if template.is_chat:
            assert self.chat is not None
            return self.chat.render(messages)
        text = messages[0]["content"]
        if not text:
            raise RequestError(Reason.EMPTY_PROMPT, f"stages.{stage}.prompt: the prompt is empty")
        return text

    def problems(self) -> list[str]:
        """Return one line for each stage whose roles the chat template refuses."""
        lines = []
        for index, template in enumerate(self.stages):
            if not template.is_chat or self.chat is None:
                continue
            messages = template.stage.messages or ()
            try:
                self.chat.render([{"role": m.role, "content": "text"} for m in messages])
            except RequestError as error:
                roles = ", ".join(message.role for message in messages)
                lines.append(
                    f"stages.{index}.messages: found the roles {roles}; {error.message}; "
                    "change the roles to those the model knows"
                )
        return lines


def make_prompter(pipeline: Pipeline, now: Callable[[], datetime] = datetime.now) -> Prompter:
    """Compile a pipeline's templates and load its model's chat template where one is needed.

    `now` is the clock of chat templates that print the date; a job passes the time of its first
    start, so that a resumed job repeats its prompts. Raises ConfigError.
    """
    stages = compile_stages(pipeline.stages)
    chat = load_chat(pipeline, now) if any(stage.is_chat for stage in stages) else None
    return Prompter(stages, chat)


def load_chat(pipeline: Pipeline, now: Callable[[], datetime] = datetime.now) -> ChatTemplate:
    """Load the chat template of a pipeline's model; raises ConfigError where there is none."""
    try:
        folder = model_folder(pipeline.target.model, pipeline.target.revision)
        return ChatTemplate.load(folder, now)
    except OSError as error:
        raise ConfigError(f"target.model: {pipeline.target.model}: {error}") from error
