// Colours code, and gives each block a button that copies it. Nothing is fetched: the site works without a network.
(function () {
  const kinds = [
    ["comment", /(?:^|(?<=\s))#[^\n]*/],
    ["text", /"[^"\n]*"|'[^'\n]*'/],
    ["command", /(?<=^(?:\$ )?)(?:headrace|torchrun|make|pip|git|curl|kill|touch|rm)(?=\s)/],
    ["option", /(?<=\s)--?[a-z][\w-]*/],
    ["word", /\b(?:import|from|with|as|for|in|def|return|if|else|True|False|None)\b(?=[\s:(.,)])/],
  ];
  const any = new RegExp(kinds.map(([, rule]) => "(" + rule.source + ")").join("|"), "gm");

  function colour(code, isPython) {
    const text = code.textContent;
    code.textContent = "";
    let done = 0;
    for (const found of text.matchAll(any)) {
      const kind = kinds[found.slice(1).findIndex((group) => group !== undefined)][0];
      if (kind === "word" && !isPython) continue;
      code.append(text.slice(done, found.index));
      const span = document.createElement("span");
      span.className = "code-" + kind;
      span.textContent = found[0];
      code.append(span);
      done = found.index + found[0].length;
    }
    code.append(text.slice(done));
  }

  // What is typed: of a block with prompts the lines after them, else the whole block.
  function typed(text) {
    const lines = text.replace(/\\\n\s*/g, "").split("\n").filter((line) => line.startsWith("$ "));
    return lines.length ? lines.map((line) => line.slice(2)).join("\n") : text;
  }

  document.querySelectorAll("pre > code").forEach((code) => {
    const text = code.textContent;
    colour(code, /language-python/.test(code.className) || /^\s*(?:import|from) /.test(text));
    if (!navigator.clipboard) return;
    const button = document.createElement("button");
    button.className = "copy-code btn btn-sm btn-outline-secondary";
    button.textContent = "Copy";
    button.addEventListener("click", () =>
      navigator.clipboard.writeText(typed(text)).then(() => {
        button.textContent = "Copied";
        setTimeout(() => (button.textContent = "Copy"), 1500);
      })
    );
    code.parentElement.append(button);
  });
})();
