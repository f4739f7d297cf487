// Writes a dashboard as TypeScript, each panel with the type that its plugin has for it.
// usage: node check.mjs DASHBOARD OUT.ts
import fs from 'fs';

const [file, out] = process.argv.slice(2);
const dashboard = JSON.parse(fs.readFileSync(file));
// What a data source adds to an annotation is not in the schema.
const added = ['expr', 'step', 'useValueForTime', 'titleFormat', 'textFormat', 'tagKeys'];
for (const one of dashboard.annotations.list) for (const field of added) delete one[field];
const kinds = { timeseries: 'TimeSeries', stat: 'Stat', table: 'Table' };
const plugin = (kind) =>
  `@grafana/schema/dist/esm/raw/composable/${kind}/panelcfg/x/${kinds[kind]}PanelCfg_types.gen`;

const lines = [
  "import type { Dashboard } from '@grafana/schema';",
  ...Object.keys(kinds).map((kind) => `import type * as ${kind} from '${plugin(kind)}';`),
  // JSON has strings where the types have enums; an object has no fields that its type lacks.
  'type Json<T> = unknown extends T ? T : T extends string ? `${T}` : T extends (infer U)[] ? Json<U>[]',
  '  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;',
  `export const dashboard: Json<Dashboard> = ${JSON.stringify(dashboard, null, 1)};`,
];
dashboard.panels.forEach((panel, place) => {
  if (panel.type === 'row') return;
  const custom = panel.fieldConfig.defaults.custom ?? {};
  const [options, fields] = [JSON.stringify(panel.options), JSON.stringify(custom)];
  lines.push(`// ${panel.title}`);
  lines.push(`export const options${place}: Json<${panel.type}.Options> = ${options};`);
  if (panel.type !== 'stat')
    lines.push(`export const custom${place}: Json<Partial<${panel.type}.FieldConfig>> = ${fields};`);
});
fs.writeFileSync(out, lines.join('\n') + '\n');
