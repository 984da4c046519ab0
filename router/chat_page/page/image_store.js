// Images of conversations, in the database of this browser: the storage of conversations takes a few megabytes only.

const NAME = "pdserve-chat";
const IMAGES = "images"; // data: URLs by id

let opening = null;

function open() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(IMAGES);
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

/** Run `work(store)` in a transaction, and return the result of the request that it returns. */
async function run(mode, work) {
  const transaction = (await open()).transaction(IMAGES, mode);
  const request = work(transaction.objectStore(IMAGES));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onabort = () => reject(transaction.error); // after an error, too
  });
}

const imagesOf = ({messages}) => messages.flatMap(({images}) => images ?? []);

/** Without a database, or room in it, images last as long as the page. */
export async function putImages(images) {
  for (const {id, url} of images) await run("readwrite", (store) => store.put(url, id)).catch(() => {});
}

/** Fill in the `url` of a conversation's images; "" of those that are gone. Return whether any was missing. */
export async function restoreImages(conversation) {
  const missing = imagesOf(conversation).filter(({url}) => url === undefined);
  for (const image of missing) image.url = (await run("readonly", (store) => store.get(image.id)).catch(() => "")) ?? "";
  return missing.length > 0;
}

export async function removeImages(conversation) {
  for (const {id} of imagesOf(conversation)) await run("readwrite", (store) => store.delete(id)).catch(() => {});
}

/** Remove the images of messages that were changed, and of conversations that are gone. */
export async function removeOtherImages(conversations) {
  const kept = new Set(conversations.flatMap(imagesOf).map(({id}) => id));
  const stored = await run("readonly", (store) => store.getAllKeys()).catch(() => []);
  for (const id of stored) if (!kept.has(id)) await run("readwrite", (store) => store.delete(id)).catch(() => {});
}
