// The whole page: the head, the list of the sections, and the sections.

const kindNames = {
  safetensors: 'safetensors file', model: 'Model', shards: 'Shards', state: 'State file', hdf5: 'HDF5 file',
    workspace: 'Newest states of the workspace',
  torch: 'PyTorch checkpoint', dcp: 'Distributed checkpoint', fsdp: 'FSDP checkpoint',
    deepspeed: 'DeepSpeed checkpoint', ranks: 'Files of ranks',
};
const sections = {
  model: { title: (section) => kindNames[section.kind] || 'Model', subject: (section) => section.path,
    view: modelSection },
  diff: { title: () => 'Difference', subject: (section) => `${section.a} ↔ ${section.b}`, view: diffSection },
  workspace: { title: () => 'Workspace', subject: (section) => section.path, view: workspaceSection },
  trace: { title: () => 'Trace', subject: (section) => section.path, view: traceSection },
  versions: { title: () => 'Versions', subject: (section) => section.source, view: versionsSection },
};

/** Names the items that the limits of a report leave out. */
function omitted(section) {
  const found = [];
  const search = (value) => {
    if (value === null || typeof value !== 'object') return;
    for (const [key, item] of Object.entries(value)) {
      if (/^(?!tensors|spans).*_left_out$/.test(key) && item > 0) {
        found.push(`${count(item)} ${key.replace(/_left_out$/, '').replaceAll('_', ' ')}`);
      } else if (key !== 'rows' && key !== 'spans' && key !== 'config') search(item);
    }
  };
  search(section);
  return found.length > 0 && paragraph(`This file leaves out further items: ${found.join(', ')}.`, 'note');
}

function showReport(data) {
  const content = document.getElementById('sections');
  const list = document.getElementById('contents');
  if (data.format !== 'muster-report' || data.format_version !== 1) {
    content.append(make('p', { class: 'bad', role: 'alert' },
      'This page cannot show its data. Write the report again with muster report.'));
    return;
  }
  const subjects = data.sections.map((section) => (sections[section.section]
    ? printable(sections[section.section].subject(section)) : ''));
  document.title = `${shorten(subjects[0] || 'Muster', 80)} – Muster report`;
  document.getElementById('written').append(`Written ${time(data.created)} by Muster ${printable(data.muster_version)}`);
  const entry = (text, target) => make('a', { href: `#${target.id}`, click: (event) => {
    // The address of a page inside another one is not its own.
    event.preventDefault();
    visit(target);
  } }, text);
  data.sections.forEach((section, index) => {
    const known = sections[section.section];
    if (!known) return;
    const subject = known.subject(section);
    const heading = make('h2', { id: `section-${index + 1}-title` }, make('span', { class: 'kind' },
      known.title(section)), ' ', name(subject, 120));
    const element = make('section', { id: `section-${index + 1}`, class: `section ${section.section}`,
      'aria-labelledby': heading.id }, heading);
    try {
      add(element, known.view(section));
      add(element, omitted(section));
    } catch (error) {
      // The other sections remain usable, and the tests see the message.
      console.error(error);
      const message = `The page cannot show this section: ${error.message}. The data in this file is complete.`;
      add(element, paragraph(say(message), 'bad'));
    }
    content.append(element);
    const inner = [...element.querySelectorAll(':scope > .part')];
    inner.forEach((part, place) => { part.id = `${element.id}-${place + 1}`; });
    list.append(make('li', {}, entry([`${known.title(section)} `, name(subject, 48)], element),
      make('ul', {}, inner.map((part) => make('li', {}, entry(part.querySelector('h3').textContent, part))))));
  });
  const unknown = data.sections.filter((section) => !sections[section.section]).length;
  if (unknown) content.append(make('p', { class: 'note' },
    `${plural(unknown, 'section')} of a newer version of Muster cannot be shown.`));
}

showReport(JSON.parse(document.getElementById('muster-data').textContent));
