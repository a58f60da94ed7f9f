"""Chat templates: what Hugging Face renders, we render; what goes wrong is the client's to read."""

from datetime import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from core.errors import InvalidRequestError
from router.chat_template import ChatMessage, ChatTemplate

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INDENTED = """{{- bos_token }}
{% if tools is not none %}
    tools
{% endif %}
{% for message in messages %}
    {% if loop.index0 == 3 %}
        {% break %}
    {% endif %}
    {% if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate,\\n  user first') }}
    {% endif %}
    [{{ message.role | upper }}] {{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% generation %}{{ messages | tojson }}{% endgeneration %}
"""
CHATS = [
    [("user", "Hi!")],
    [("user", "a <b> & 'c'"), ("assistant", "  é 你好 👩‍👩‍👧 ")],
    [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "5")],
    [("system", "s"), ("user", "{{ 7 * 7 }}{% for %}")],
    [],
]


def messages(*turns):
    return [ChatMessage(role=role, content=content) for role, content in turns]


def refusal(template, *turns) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        template.render(messages(*turns))
    assert caught.value.param == "messages"
    return str(caught.value)


@pytest.mark.parametrize("source", [CHATML, INDENTED, "{{ bos_token is defined }}{{ eos_token }}"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tokens", [{}, {"bos_token": "<s>", "eos_token": "</s>"}])
def test_renders_what_transformers_renders(source, chat, tokens):
    conversation = [{"role": role, "content": content} for role, content in chat]
    try:
        rendered, _ = render_jinja_template(
            [conversation], chat_template=source, add_generation_prompt=True, **tokens
        )
    except Exception:
        refusal(ChatTemplate(source, **tokens), *chat)
    else:
        assert ChatTemplate(source, **tokens).render(messages(*chat)) == rendered[0]


def test_message_text_is_never_template_code():
    text = "{{ 7 * 7 }}{% raw %}"
    assert text in ChatTemplate(CHATML).render(messages(("user", text)))


def test_the_generation_prompt_can_be_left_out():
    template = ChatTemplate(CHATML)
    turns = messages(("user", "x"))
    assert template.render(turns).endswith("<|im_start|>assistant\n")
    assert template.render(turns, add_generation_prompt=False).endswith("<|im_end|>\n")


def test_the_templates_own_refusal_reaches_the_client_on_one_line():
    reason = refusal(ChatTemplate(INDENTED, bos_token=""), ("system", "x"))
    assert reason == "the chat template refuses these messages: Roles must alternate, user first"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_whatever_a_template_does_wrong_becomes_a_safe_refusal(source):
    reason = refusal(ChatTemplate(source), ("user", "secret"))
    assert reason == "the chat template cannot render these messages"


def test_runaway_output_is_stopped():
    source = "{% for i in range(90000) %}{% for j in range(90000) %}xxxx{% endfor %}{% endfor %}"
    assert "exceeds 1000 characters" in refusal(ChatTemplate(source, max_chars=1000), ("user", "x"))


def test_a_model_without_a_template_says_so():
    template = ChatTemplate(None)
    assert template.problem is not None
    assert "no chat template" in refusal(template, ("user", "x"))


def test_a_broken_template_is_told_at_start_and_refused_at_use():
    template = ChatTemplate("{% for %}")
    assert template.problem is not None
    assert template.problem in refusal(template, ("user", "x"))
    assert ChatTemplate(CHATML).problem is None


def test_the_date_comes_from_the_clock_given():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2025, 2, 3))
    assert template.render([]) == "03 Feb 2025"
