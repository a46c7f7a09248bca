// Requests to the server. A new request cancels an older one of the same kind.

const asking = new Map();

export class Moot extends Error {}

export async function ask(name, parameters = {}, kind = name) {
  asking.get(kind)?.abort();
  const control = new AbortController();
  asking.set(kind, control);
  const query = new URLSearchParams(
    Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null && value !== ''));
  try {
    const response = await fetch(`/api/${name}?${query}`, { signal: control.signal });
    return await told(response);
  } catch (error) {
    if (control.signal.aborted) throw new Moot();
    throw error;
  } finally {
    if (asking.get(kind) === control) asking.delete(kind);
  }
}

export async function handIn(file) {
  const response = await fetch(`/api/directions?${new URLSearchParams({ name: file.name })}`, {
    method: 'POST', body: await file.arrayBuffer(), headers: { 'Content-Type': 'application/octet-stream' },
  });
  return told(response);
}

async function told(response) {
  const body = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(body.error ?? response.statusText);
  return body;
}
