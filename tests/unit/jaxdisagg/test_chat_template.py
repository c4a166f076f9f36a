import json
import re

import pytest

from jaxdisagg.chat_template import ChatTemplate, load_template

USER = [{"role": "user", "content": "<b> é"}]


def render(source: str, options: dict | None = None, **special: str) -> str:
    return ChatTemplate(source, special).render(USER, options)


def test_tojson_keeps_html_and_letters():
    assert render("{{ messages | tojson }}") == json.dumps(USER, ensure_ascii=False)
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_special_tokens_and_options_are_variables():
    source = "{{ bos_token }}{{ add_generation_prompt }}{{ enable_thinking }}{{ tools is none }}"
    assert render(source, {"enable_thinking": False}, bos_token="<s>") == "<s>TrueFalseTrue"


def test_options_cannot_replace_the_messages():
    assert render("{{ messages[0].content }}", {"messages": []}) == "<b> é"


def test_blocks_leave_no_white_space_and_loops_break():
    source = (
        "{% for x in [1, 2] %}\n  {% if x == 2 %}\n{% break %}\n{% endif %}\n{{ x }}\n{% endfor %}"
    )
    assert render(source) == "1\n"


def test_generation_tag_is_transparent():
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"


def test_strftime_now():
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_refusal_is_a_value_error_in_the_templates_words(source, message):
    with pytest.raises(ValueError, match=message):
        render(source)


def test_the_template_file_wins_over_the_tokenizer_settings(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    load = lambda settings: load_template(tmp_path, settings, {})  # noqa: E731
    assert load({}) is None
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    assert load({"chat_template": named}).render([]) == "d"
    assert load({"chat_template": "plain"}).render([]) == "plain"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert load({"chat_template": "plain"}).render([]) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load({"chat_template": "plain"}).render([]) == "jinja"
