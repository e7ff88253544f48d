"use strict";
// Shows the batches of a server. Everything that the server says is set as text, never as HTML. The API key is in
// the variable `key` and nowhere else.
(() => {
  const POLL_MS = 2000;
  const POLL_SHARE = 0.1; // Maximum fraction of the time that polls take, however many batches are shown.
  const AWAY_MS = 20000; // A server that takes longer to answer counts as unreachable.
  const BATCHES_A_PAGE = 100, MOST_BATCHES = 10000; // The API lists at most this many.
  const LOAD_S = 3600; // Length of the time axis of the load.
  const GAP_S = 20; // Without a load sample for this long, nothing ran.
  const ASK_MS = 5000; // Time for which a button asks whether to cancel.
  const LONGEST_TEXT = 1000;
  const HEAD_BYTES = 16384; // Part of an error file that is read.
  const ERROR_LINES = 5; // Lines of an error file that are shown.
  const STATES = {
    validating: "wait", in_progress: "wait", finalizing: "live", cancelling: "warn",
    completed: "good", failed: "bad", expired: "warn", cancelled: "done",
  };
  const CHARTS = [
    {title: "Output tokens a second", lines: {output_tokens_per_s: "all batches"}},
    {title: "Prompt tokens a second", lines: {prompt_tokens_per_s: "all batches"}},
    {title: "Requests in the engine", lines: {running: "running", queue: "waiting"}},
    {title: "Token usage", lines: {token_usage: "of the KV pool"}, top: 1},
  ];
  const BODIES = { // Bodies of the example request, by endpoint.
    "/v1/chat/completions": {messages: [{role: "user", content: "Name a town."}]},
    "/v1/embeddings": {input: "a text"},
    "/v1/classify": {input: "a text"},
    "/v1/rerank": {query: "a question", documents: ["one text", "another text"]},
  };

  const one = (selector, parent = document) => parent.querySelector(selector);
  const main = one("main"), login = one("#login"), notice = one("#notice");
  let key = "";
  let view = null; // Data about the batches of this API key; a new key begins a new view.
  let timer = 0;

  // Texts

  const number = (value) => value.toLocaleString("en");
  const short = (value) =>
    value.toLocaleString("en", {notation: "compact", maximumSignificantDigits: value < 1 ? 2 : 3});
  const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
  const moment = (seconds) => new Date(seconds * 1000).toLocaleString();
  const clipped = (text) => (text.length > LONGEST_TEXT ? `${text.slice(0, LONGEST_TEXT)}…` : text);
  const duration = (seconds) => {
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    const minutes = Math.floor(s / 60), hours = Math.floor(minutes / 60);
    if (minutes < 10 && s % 60) return `${minutes} min ${s % 60} s`;
    if (hours < 1) return `${minutes} min`;
    return hours < 24 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
  };
  const ago = (seconds) => `${duration(seconds < 60 ? seconds : seconds - (seconds % 60))} ago`;
  const setText = (element, text) => {
    if (element.textContent !== text) element.textContent = text; // A selection in unchanged text stays.
  };
  const make = (tag, text, className = "") => {
    const element = document.createElement(tag);
    element.textContent = text;
    element.className = className;
    return element;
  };

  // Calls

  const call = async (path, options = {}) => {
    const headers = {...options.headers};
    if (key) headers.Authorization = `Bearer ${key}`;
    const signal = AbortSignal.timeout(AWAY_MS);
    const response = await fetch(path, {...options, headers, signal, cache: "no-store"});
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    const failure = new Error(clipped(String(body?.error?.message ?? `The server answered ${response.status}.`)));
    failure.status = response.status;
    throw failure;
  };
  const read = async (path) => (await call(path)).json();

  // Polls

  const poll = async () => {
    clearTimeout(timer);
    const mine = view, began = performance.now();
    if (mine.isPolling) {
      mine.pollsAgain = true;
      return;
    }
    mine.isPolling = true;
    mine.pollsAgain = false;
    try {
      const activity = await read(`v1/activity?since=${mine.load.time.at(-1) ?? 0}`);
      if (activity.version !== mine.version || mine.limit !== mine.limitRead) {
        const limit = mine.limit, list = await read(`v1/batches?limit=${limit}`);
        Object.assign(mine, {version: activity.version, limitRead: limit, list});
      }
      if (mine !== view) return; // The key was forgotten meanwhile.
      addLoad(mine.load, activity);
      mine.activity = activity;
      show();
      setText(notice, "");
    } catch (failure) {
      if (mine !== view) return;
      if (failure.status === 401) {
        forget(key ? "This key is not valid." : "");
        return;
      }
      const away = "The server does not answer. This page tries again by itself.";
      setText(notice, failure.status ? failure.message : away);
    } finally {
      mine.isPolling = false;
    }
    const pause = mine.pollsAgain ? 0 : Math.max(POLL_MS, (performance.now() - began) / POLL_SHARE);
    if (document.visibilityState === "visible") timer = setTimeout(poll, pause);
  };
  const begin = () => {
    view = {
      version: null, limit: BATCHES_A_PAGE, limitRead: 0, list: null, activity: null, rows: new Map(),
      load: {time: []}, at: null, isPolling: false, pollsAgain: false,
    };
    for (const list of document.querySelectorAll(".batches")) list.replaceChildren();
    poll();
  };
  const forget = (refusal) => {
    key = "";
    clearTimeout(timer);
    view = null;
    main.hidden = one("#forget").hidden = one("#simulated").hidden = true;
    login.hidden = false;
    setText(notice, "");
    setText(one("#model"), "Batches");
    setText(one("#who"), "");
    document.title = "Batches";
    for (const list of document.querySelectorAll(".batches, #tiles, .charts")) list.replaceChildren();
    setText(one("#refusal"), refusal);
    one("#key").focus();
  };

  // Batches

  const show = () => {
    const {activity, list} = view;
    const running = activity.running.map(({batch, ...run}) => ({batch, run}));
    const names = new Set(running.map(({batch}) => batch.id));
    const others = list.data.filter((batch) => !names.has(batch.id)).map((batch) => ({batch, run: null}));
    fill(one("#running ul"), running);
    fill(one("#all ul"), others);
    for (const [name, row] of view.rows) if (!row.element.isConnected) view.rows.delete(name);
    const hasNone = !running.length && !list.data.length;
    one("#running").hidden = !running.length;
    one("#all").hidden = !others.length && !list.has_more;
    one("#more").hidden = !list.has_more || view.limit >= MOST_BATCHES;
    one("#empty").hidden = !hasNone;
    if (hasNone) setText(one("#empty pre"), example());
    setText(one("#model"), activity.model);
    setText(one("#who"), activity.owner === null ? "batchrun serve" : `batchrun serve · ${activity.owner}`);
    one("#forget").hidden = !key;
    one("#simulated").hidden = !activity.simulated;
    document.title = running.length ? `${running.length} running · ${activity.model}` : `Batches · ${activity.model}`;
    showTiles();
    showLoad();
    login.hidden = true;
    main.hidden = false;
  };
  const fill = (parent, items) => {
    let next = parent.firstElementChild;
    for (const item of items) {
      const name = item.batch.id;
      if (!view.rows.has(name)) view.rows.set(name, newRow());
      const row = view.rows.get(name);
      Object.assign(row, item);
      showRow(row);
      if (row.element === next) next = next.nextElementSibling;
      else parent.insertBefore(row.element, next);
    }
    while (next) {
      const outdated = next;
      next = next.nextElementSibling;
      outdated.remove();
    }
  };
  const newRow = () => {
    const element = one("#batch").content.firstElementChild.cloneNode(true);
    const row = {element, batch: null, run: null, asks: false, problem: "", input: null, errorLines: null};
    one(".cancel", element).addEventListener("click", () => cancel(row));
    one("details", element).addEventListener("toggle", () => showRow(row));
    return row;
  };
  const showRow = (row) => {
    const {element, batch, run} = row;
    const {total, completed, failed} = batch.request_counts;
    const metadata = Object.entries(batch.metadata ?? {}).map(([name, value]) => `${name}: ${value}`);
    const state = one(".state", element), isRunning = run && batch.status === "in_progress";
    setText(state, batch.status.replace("_", " "));
    state.className = `state ${isRunning ? "live" : STATES[batch.status]}`;
    setText(one(".name", element), clipped(metadata.join(", ") || batch.id));
    setText(one(".owner", element), batch.owner ?? "");
    one(".ok", element).style.width = `${total ? (100 * completed) / total : 0}%`;
    one(".failed", element).style.width = `${total ? (100 * failed) / total : 0}%`;
    const progress = one(".progress", element);
    progress.setAttribute("aria-label", `${number(completed + failed)} of ${plural(total, "request")} done`);
    progress.hidden = !total;
    showFigures(one(".figures", element), row);
    const errors = batch.errors?.data ?? [];
    const more = errors.length > 1 ? ` (and ${plural(errors.length - 1, "further error")})` : "";
    setText(one(".problem", element), row.problem || (errors.length ? clipped(errors[0].message) + more : ""));
    const button = one(".cancel", element);
    button.hidden = !["validating", "in_progress"].includes(batch.status);
    button.classList.toggle("asked", row.asks);
    setText(button, row.asks ? "Cancel this batch?" : "Cancel");
    if (one("details", element).open) {
      showDetails(row);
      readFiles(row);
    }
  };
  const showFigures = (parent, {batch, run}) => {
    const {total, completed, failed} = batch.request_counts;
    const figures = [];
    if (total) figures.push(`${number(completed + failed)} of ${plural(total, "request")}`);
    if (failed) figures.push(`${number(failed)} failed`);
    if (run) {
      if (run.is_paused) figures.push("paused: the tokens of this day (UTC) are used up");
      else figures.push(run.time_left_s === null ? "time left unknown" : `${duration(run.time_left_s)} left`);
      figures.push(`${short(run.tokens)} tokens`, `${short(run.tokens_per_s)} tokens/s`);
    } else if (batch.status === "validating") {
      figures.push("the file is checked");
    } else if (batch.status === "in_progress") {
      figures.push("waits for its turn or for the engine");
    } else {
      const ended = batch[`${batch.status}_at`];
      if (ended && batch.in_progress_at) figures.push(`took ${duration(ended - batch.in_progress_at)}`);
      if (batch.usage) figures.push(`${short(batch.usage.total_tokens)} tokens`);
    }
    figures.push(`created ${ago(view.activity.time - batch.created_at)}`);
    showTexts(parent, figures, () => "span");
  };
  const showTexts = (parent, texts, tagOf) => {
    if (parent.childElementCount !== texts.length) {
      parent.replaceChildren(...texts.map((text, index) => make(tagOf(index), text)));
    }
    texts.forEach((text, index) => setText(parent.children[index], text));
  };
  const cancel = async (row) => {
    row.problem = "";
    row.asks = !row.asks;
    showRow(row);
    if (row.asks) {
      setTimeout(() => {
        row.asks = false;
        if (row.element.isConnected) showRow(row);
      }, ASK_MS);
      return;
    }
    const mine = view, button = one(".cancel", row.element);
    button.disabled = true;
    try {
      await call(`v1/batches/${row.batch.id}/cancel`, {method: "POST"});
    } catch (failure) {
      row.problem = failure.status ? failure.message : "The server did not answer: try again.";
    }
    button.disabled = false;
    if (mine !== view) return;
    showRow(row);
    poll();
  };

  // Details

  // Reads the files with details that the list of batches lacks, each once.
  const readFiles = async (row) => {
    const {input_file_id: input, error_file_id: errors} = row.batch;
    if (row.input === null) {
      row.input = input;
      row.input = await read(`v1/files/${input}`).then(({filename}) => `${filename} (${input})`, () => input);
    }
    if (errors && row.errorLines === null) {
      row.errorLines = [];
      row.errorLines = await readErrors(errors).catch(({message}) => [["Failed", message]]);
    }
    if (row.element.isConnected) showDetails(row);
  };
  const readErrors = async (name) => {
    const response = await call(`v1/files/${name}/content`, {headers: {Range: `bytes=0-${HEAD_BYTES - 1}`}});
    const lines = (await response.text()).split("\n").slice(0, -1); // The last line may be incomplete.
    return lines.slice(0, ERROR_LINES).map(JSON.parse).map(({custom_id: name, error}) => [
      name === null ? "Failed" : `Failed: ${name}`,
      error.message,
    ]);
  };
  const showDetails = ({element, batch, input, errorLines}) => {
    const facts = [
      ["Batch", batch.id],
      ["Created", moment(batch.created_at)],
      ["Expires", moment(batch.expires_at)],
      ["Endpoint", batch.endpoint],
      ["Model", batch.model],
      ["Input", input ?? batch.input_file_id],
    ];
    if (batch.output_file_id) facts.push(["Output", batch.output_file_id]);
    if (batch.error_file_id) facts.push(["Failed lines", batch.error_file_id]);
    if (batch.usage) {
      const {input_tokens: prompt, input_tokens_details: {cached_tokens: cached}, output_tokens: output} = batch.usage;
      const input = `${number(prompt)} input (${number(cached)} from the prefix cache)`;
      facts.push(["Tokens", `${input}, ${number(output)} output`]);
    }
    for (const [name, value] of Object.entries(batch.metadata ?? {})) facts.push([name, value]);
    for (const {line, message} of batch.errors?.data ?? []) {
      facts.push([line === null ? "Error" : `Line ${line}`, message]);
    }
    facts.push(...(errorLines ?? []));
    const texts = facts.flat().map((text) => clipped(String(text)));
    showTexts(one(".facts", element), texts, (index) => (index % 2 ? "dd" : "dt"));
  };
  const example = () => {
    const {model, endpoints} = view.activity;
    const endpoint = endpoints[0], body = {model, ...BODIES[endpoint]};
    const line = JSON.stringify({custom_id: "1", method: "POST", url: endpoint, body});
    const address = new URL("v1", location.href).href;
    return [
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url=${JSON.stringify(address)}, api_key="${key ? "YOUR KEY" : "none"}")`,
      `line = r'''${line}'''`,
      'file = client.files.create(file=("requests.jsonl", line.encode()), purpose="batch")',
      `client.batches.create(input_file_id=file.id, endpoint="${endpoint}", completion_window="24h")`,
    ].join("\n");
  };

  // Load

  const showTiles = () => {
    const {activity: {running, waiting}, load} = view;
    const isNow = load.time.length && view.activity.time - load.time.at(-1) < GAP_S;
    const newest = (name) => (isNow ? load[name].at(-1) : null);
    const [usage, engine, queue] = ["token_usage", "running", "queue"].map(newest);
    const speed = isNow ? newest("output_tokens_per_s") + newest("prompt_tokens_per_s") : 0;
    const tiles = [
      ["Batches", `${number(running.length)} running`, waiting ? `${number(waiting)} waiting` : "none waiting"],
      ["Speed of all batches", `${short(speed)} tok/s`, "input and output"],
      [
        "Requests in the engine",
        engine === null ? "–" : `${short(engine)} running`,
        queue === null ? "" : `${short(queue)} waiting`,
      ],
      ["Token usage", usage === null ? "–" : usage.toFixed(2), "of the KV pool"],
    ];
    one("#tiles").replaceChildren(...tiles.map(([name, value, note]) => {
      const tile = make("div", "", "tile"), values = document.createElement("dd");
      values.append(make("b", value), " ", make("span", note));
      tile.append(make("dt", name), values);
      return tile;
    }));
  };
  const addLoad = (load, {load: points, time}) => {
    const oldest = time - LOAD_S;
    for (const name of Object.keys(points)) load[name] = [...(load[name] ?? []), ...points[name]];
    const outdated = load.time.findIndex((at) => at >= oldest);
    const dropped = outdated < 0 ? load.time.length : outdated;
    for (const name of Object.keys(points)) load[name].splice(0, dropped);
  };
  const newChart = ({title, lines}) => {
    const figure = one("#chart").content.firstElementChild.cloneNode(true), svg = one("svg", figure);
    setText(one("h3", figure), title);
    Object.values(lines).forEach((label, index) => {
      const item = document.createElement("li"), path = document.createElementNS(svg.namespaceURI, "path");
      item.append(make("i", "", `key c${index}`), label, make("output", ""));
      one(".legend", figure).append(item);
      path.setAttribute("class", `line c${index}`);
      svg.append(path);
    });
    for (const [axis, side] of [[".ys", "top"], [".xs", "left"]]) {
      for (const place of ["0%", "50%", "100%"]) {
        const tick = make("span", "");
        tick.style[side] = place;
        one(axis, figure).append(tick);
      }
    }
    const plot = one(".plot", figure);
    const point = (event) => {
      const box = plot.getBoundingClientRect();
      view.at = (event.clientX - box.left) / box.width;
      showLoad();
    };
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerleave", () => {
      if (!view) return;
      view.at = null;
      showLoad();
    });
    return figure;
  };
  const roundTop = (highest) => {
    const power = 10 ** Math.floor(Math.log10(highest));
    return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= highest * 0.9999);
  };
  const showLoad = () => {
    const {load, at, activity: {time: now}} = view;
    const parent = one("#load .charts"), hint = one("#load .hint");
    parent.hidden = !load.time.length;
    if (!load.time.length) {
      setText(hint, "No batch has run in the last hour.");
      return;
    }
    if (!parent.childElementCount) parent.append(...CHARTS.map(newChart));
    const length = Math.min(LOAD_S, Math.max(60, now - load.time[0])), began = now - length;
    const places = load.time.map((time) => (time - began) / length);
    const distances = places.map((place) => Math.abs(place - at));
    const index = at === null ? places.length - 1 : distances.indexOf(Math.min(...distances));
    setText(hint, at === null ? "Gaps: no batch ran." : ago(now - load.time[index]));
    CHARTS.forEach((chart, nth) => showChart(parent.children[nth], chart, {places, index, length, at}));
  };
  const showChart = (figure, {lines, top = 0}, {places, index, length, at}) => {
    const {load} = view;
    const values = Object.keys(lines).map((name) => load[name]);
    const highest = Math.max(top, ...values.flat().filter((value) => value !== null));
    const end = highest > 0 ? roundTop(highest) : 1;
    values.forEach((line, nth) => {
      let path = "", isConnected = false;
      line.forEach((value, place) => {
        isConnected &&= load.time[place] - load.time[place - 1] < GAP_S;
        if (value !== null) {
          const point = `${(1000 * places[place]).toFixed(1)} ${(100 - (100 * value) / end).toFixed(1)}`;
          path += isConnected ? `L${point}` : `M${point}h.01`; // A single point becomes a dot.
        }
        isConnected = value !== null;
      });
      figure.querySelectorAll(".line")[nth].setAttribute("d", path);
      const value = line[index];
      setText(figure.querySelectorAll("output")[nth], value === null ? "–" : short(value));
    });
    const [ys, xs] = [one(".ys", figure), one(".xs", figure)];
    [end, end / 2, 0].forEach((value, nth) => setText(ys.children[nth], short(value)));
    [ago(length), "", "now"].forEach((text, nth) => setText(xs.children[nth], text));
    const cursor = one(".cursor", figure);
    cursor.hidden = at === null;
    cursor.style.left = `${100 * places[index]}%`;
    const newest = values.map((line, nth) => `${Object.values(lines)[nth]} ${line.at(-1) ?? "unknown"}`);
    one("svg", figure).setAttribute("aria-label", `${one("h3", figure).textContent}, now: ${newest.join(", ")}`);
  };

  // Events

  login.addEventListener("submit", (event) => {
    event.preventDefault();
    const entered = one("#key").value.trim();
    one("#key").value = "";
    if (!/^[\x21-\x7e]+$/.test(entered)) { // Other characters are not allowed in a header.
      setText(one("#refusal"), "This key is not valid.");
      return;
    }
    setText(one("#refusal"), "");
    key = entered;
    begin();
  });
  one("#forget").addEventListener("click", () => forget(""));
  one("#more").addEventListener("click", () => {
    view.limit += BATCHES_A_PAGE;
    poll();
  });
  one("#copy").addEventListener("click", async () => {
    const text = one("#empty pre"), copy = one("#copy");
    getSelection().selectAllChildren(text); // Without HTTPS, browsers do not let a page write to the clipboard.
    await navigator.clipboard?.writeText(text.textContent).then(() => setText(copy, "Copied"), () => {});
  });
  document.addEventListener("visibilitychange", () => {
    clearTimeout(timer);
    if (view && document.visibilityState === "visible") poll();
  });
  begin();
})();
