// Chooses the shown page by the address after #, so that each page has a URL, whatever path a proxy uses for the console.
/** Returns the id of the job or round whose page is shown; null for the overview. */
export const workOf = hash => /^#\/work\/([0-9a-z]{32})$/.exec(hash)?.[1] ?? null
export const toWork = id => `#/work/${id}`
