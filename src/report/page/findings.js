// Problems, issues and remarks about a model, with remedies.

const remedies = {
  file: 'Copy the file again from its source. If the source is damaged as well, use another copy or an earlier step.',
  missing: 'Copy the missing file. If the job never wrote it, use an earlier step; muster ls lists the steps.',
  not_indexed: 'Add the tensor or the file to the index, or remove the file if it belongs to another model.',
  duplicate: 'Keep one of the copies, and remove the other one.',
  index: 'Copy the index again. If its source is damaged, export the model again from a complete source.',
  numbering: 'The directory has files of two sets, or a part of one. Copy one complete set into an empty directory.',
  mismatch: 'Do not mix files of different jobs or models. Copy the files of one job, with its config.json.',
  checksum: 'The bytes have changed since they were written. Copy the file again, and run muster verify. '
    + 'After an intended change, run muster verify --write-checksums.',
  leftover: 'A process ended and left this file behind. muster gc removes such files.',
  unreadable: 'Muster cannot read this kind of HDF5 dataset. Convert it with the program that wrote it.',
};

function verdict(isGood, good, bad) {
  return make('p', { class: isGood ? 'good' : 'bad' }, make('strong', {}, isGood ? `✓ ${good}` : `✕ ${bad}`));
}

function problemsOf(verify) {
  return verify ? verify.problems.length + (verify.problems_left_out || 0) : 0;
}

function findings(section) {
  const { verify, issues } = section;
  const titled = (title, content) => content && [make('h4', {}, title), content];
  const checks = verify && (!verify.has_checksums ? 'There are no checksums.'
    : verify.checked ? `${plural(verify.checked, 'tensor')} compared with checksums.`
      : 'The file has checksums, which this report did not check. --checksums checks them.');
  return [
    verify && [verdict(verify.good, 'verify: no problem found.', `verify: ${plural(problemsOf(verify), 'problem')}.`),
      paragraph(checks)],
    !verify && section.verify_error && paragraph(['verify was not run: ', say(section.verify_error)]),
    verify && simpleTable('Problems', verify.problems, [['Defect', 'defect'], ['Message', 'message', 'message'],
      ['Remedy', (problem) => remedies[problem.defect], 'message'],
      ['Place', (problem) => problem.tensor ?? problem.file, 'name', ({ file, tensor }) =>
        [file, tensor].filter(Boolean).map((text) => make('div', {}, name(text)))]]),
    titled('Issues', simpleTable('Issues', issues, [['Kind', 'kind'], ['Message', 'message', 'message'],
      ['Tensor', 'tensor', 'name']])),
    verify && titled('Notes', list(verify.notes, say)),
    verify && titled('Data that does not belong to the model', list(verify.left_out, (item) =>
      [name(item.name), ': ', say(item.reason)])),
  ];
}

/** Returns facts, texts of headers and the config. */
function factsOf(section) {
  const entries = (object, show) => {
    const pairs = Object.entries(object || {});
    return pairs.length > 0 && definitions(pairs.map(([key, value]) => [say(key), show(value)]));
  };
  const metadata = entries(section.metadata, (text) => make('pre', {}, text.split('\n').map(printable).join('\n')));
  return [
    entries(section.facts, (value) => say(typeof value === 'object' ? JSON.stringify(value) : value)),
    metadata && [make('h4', {}, 'Metadata'), metadata],
    section.config_bytes > 0 && [make('h4', {}, 'Config'), section.config !== null ? treeView(section.config)
      : paragraph(`The config of ${count(section.config_bytes)} bytes is too large for this file. muster show --config prints it.`)],
  ];
}

/** Shows a tree of objects, lists and values. Inner levels are made when they are opened. */
function treeView(value, key = null) {
  const label = key !== null && [make('span', { class: 'key' }, say(key)), ' '];
  const entries = value !== null && typeof value === 'object' ? Object.entries(value) : [];
  const isFlat = entries.every(([, item]) => item === null || typeof item !== 'object');
  if (!entries.length || (isFlat && Array.isArray(value) && JSON.stringify(value).length < 80)) {
    return make('div', { class: 'leaf' }, label, make('bdi', { class: 'string' }, printable(JSON.stringify(value))));
  }
  const body = make('div', { class: 'branch' });
  const fill = () => {
    if (body.firstChild) return;
    add(body, entries.slice(0, 2000).map(([inner, item]) => treeView(item, inner)));
    if (entries.length > 2000) add(body, paragraph(`and ${count(entries.length - 2000)} more`));
  };
  if (key === null) fill();
  return make('details', { open: key === null, toggle: fill }, make('summary', {}, label,
    make('span', { class: 'faint' }, plural(entries.length, Array.isArray(value) ? 'item' : 'key'))), body);
}
