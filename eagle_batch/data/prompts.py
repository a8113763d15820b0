"""From a row to the text that a model completes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from eagle_batch.data.chat import ChatTemplate, model_folder
from eagle_batch.data.templates import StageTemplate, compile_stages
from eagle_batch.errors import ConfigError, Reason, RequestError
from eagle_batch.pipeline import Message, Pipeline, Stage


@dataclass(frozen=True, slots=True)
class Prompter:
    """Renders the prompts of every stage of one pipeline."""

    stages: tuple[StageTemplate, ...]
    #: None where no stage has messages.
    chat: ChatTemplate | None

    def adds_special_tokens(self, stage: int, judge: int | None = None) -> bool:
        """Whether the tokenizer adds its special tokens; a chat template has written its own."""
        return not self.stages[stage].is_chat(judge)

    def render(self, stage: int, values: Mapping[str, object], judge: int | None = None) -> str:
        """Return the prompt of one row; `values` are its columns and the texts of earlier stages.

        It is that of the stage, or of the judge at that place of its validators. Raises
        RequestError where the row's values make no prompt.
        """
        template = self.stages[stage]
        messages = template.render(values, judge)
        if template.is_chat(judge):
            assert self.chat is not None
            if template.stage.magpie and judge is None:
                return self.chat.open_turn(messages)[0]
            if judge is not None:
                return self.chat.render(messages)
            options = template.stage.template_options
            return self.chat.render(messages, options, template.prefill(values))
        text = str(messages[0]["content"])
        if not text:
            raise RequestError(Reason.EMPTY_PROMPT, f"stages.{stage}.prompt: the prompt is empty")
        return text

    def ending(self, stage: int) -> str:
        """Return what ends a text that is a user's turn; empty for other texts."""
        if not self.stages[stage].stage.magpie:
            return ""
        assert self.chat is not None
        return self.chat.open_turn(())[1]

    def problems(self) -> list[str]:
        """Return one line for each stage whose roles the chat template refuses."""
        if self.chat is None:
            return []
        lines = []
        for index, template in enumerate(self.stages):
            lines += [
                f"stages.{index}.template_options.{problem}"
                for problem in self.chat.option_problems(template.stage.template_options)
            ]
            for key, messages in _chats(template.stage):
                if any(message.turns is not None for message in messages):
                    continue  # Only a row can tell which roles there are.
                open_turn = template.stage.magpie and key == "messages"
                render = self.chat.open_turn if open_turn else self.chat.render
                try:
                    render([{"role": m.role or "", "content": "text"} for m in messages])
                except RequestError as error:
                    roles = ", ".join(message.role or "" for message in messages)
                    lines.append(
                        f"stages.{index}.{key}: found the roles {roles}; {error.message}; "
                        "change the roles to those the model knows"
                    )
        return lines


def _chats(stage: Stage) -> Iterator[tuple[str, Sequence[Message]]]:
    """Yield the messages of a stage and of its judges, with where they stand."""
    if stage.messages is not None or stage.magpie:
        yield "messages", stage.messages or ()
    for number, validator in enumerate(stage.validators):
        if validator.judge is not None and validator.judge.messages is not None:
            yield f"validators.{number}.judge.messages", validator.judge.messages


def uses_chat(pipeline: Pipeline) -> bool:
    """Tell whether anything of a pipeline goes through the model's chat template."""
    return any(True for stage in pipeline.stages for _ in _chats(stage))


def make_prompter(pipeline: Pipeline, now: Callable[[], datetime] = datetime.now) -> Prompter:
    """Compile a pipeline's templates and load its model's chat template where one is needed.

    `now` is the clock of chat templates that print the date; a job passes the time of its first
    start, so that a resumed job repeats its prompts. Raises ConfigError.
    """
    stages = compile_stages(pipeline.stages)
    chat = load_chat(pipeline, now) if uses_chat(pipeline) else None
    return Prompter(stages, chat)


def load_chat(pipeline: Pipeline, now: Callable[[], datetime] = datetime.now) -> ChatTemplate:
    """Load the chat template of a pipeline's model; raises ConfigError where there is none."""
    try:
        folder = model_folder(pipeline.target.model, pipeline.target.revision)
        return ChatTemplate.load(folder, now)
    except OSError as error:
        raise ConfigError(f"target.model: {pipeline.target.model}: {error}") from error
