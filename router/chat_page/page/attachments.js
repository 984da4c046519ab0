// Images that the next message will have: pasted, dropped or chosen, made smaller where they are large, and shown.

import {element, find, say} from "./dom.js";
import {count} from "./format.js";

const LONGEST = 2048; // pixels of a side; text of a screenshot stays legible
const MOST = 10; // images of a message
const MOST_BYTES = 8 << 20; // of a file that is sent as it is
const AS_THEY_ARE = ["image/png", "image/jpeg", "image/webp"]; // other formats become PNG; GIFs may be animated
const QUALITY = 0.92; // of JPEG and WebP

/** The images beside the message field. `refusal()`: why the model takes none, or ""; `follow(change)`: see main.js. */
export class Attachments {
  constructor(refusal, follow) {
    this.refusal = refusal;
    this.follow = follow;
    this.images = []; // {id, name, width, height, was, url}
    this.reading = Promise.resolve();
    find("attach").addEventListener("click", () => find("files").click());
    find("files").addEventListener("change", () => {
      this.add([...find("files").files]);
      find("files").value = ""; // so that the same file can be chosen again
    });
    document.addEventListener("paste", (event) => this.#take(event, event.clipboardData));
    const main = document.querySelector("main");
    main.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      main.classList.add("dropping");
    });
    main.addEventListener("dragleave", (event) => {
      if (!main.contains(event.relatedTarget)) main.classList.remove("dropping");
    });
    main.addEventListener("drop", (event) => {
      main.classList.remove("dropping");
      this.#take(event, event.dataTransfer, true);
    });
  }

  /** Add files when those before them are read. */
  add(files) {
    this.reading = this.reading.then(() => this.#read(files));
    return this.reading;
  }

  /** Return the images and forget them. */
  take() {
    const taken = this.images;
    this.images = [];
    this.notice("");
    this.#show();
    return taken;
  }

  notice(text) {
    this.follow(() => {
      say(find("notice"), text);
      find("notice").hidden = !text;
    });
  }

  /** Text is pasted as text, also where a program offers a picture of it. */
  #take(event, data, dropped = false) {
    if (!data?.files.length || (!dropped && data.types.includes("text/plain"))) return;
    event.preventDefault();
    this.add([...data.files]);
  }

  async #read(files) {
    const refusal = this.refusal();
    if (refusal) return this.notice(refusal);
    const notes = [];
    for (const file of files) {
      if (this.images.length === MOST) {
        notes.push(`A message takes up to ${MOST} images.`);
        break;
      }
      try {
        const image = await read(file);
        this.images.push(image);
        if (image.was) notes.push(`${image.name} is sent as ${size(image)} instead of ${size(image.was)} pixels.`);
      } catch (error) {
        notes.push(error.message);
      }
    }
    this.notice(notes.join(" "));
    this.#show();
    find("entry").focus();
  }

  #show() {
    this.follow(() => {
      find("attachments").hidden = !this.images.length;
      find("attachments").replaceChildren(...this.images.map((image) => this.#thumbnail(image)));
    });
  }

  #thumbnail(image) {
    const remove = element("button", {type: "button", "aria-label": `Remove ${image.name}`, title: "Remove"}, "×");
    remove.addEventListener("click", () => {
      this.images = this.images.filter((each) => each !== image);
      this.notice("");
      this.#show();
      find("entry").focus();
    });
    return element("li", {}, element("img", {src: image.url, alt: image.name, title: size(image)}), remove);
  }
}

const size = ({width, height}) => `${count(width)} × ${count(height)}`;

/** Return an image of a file, with a data: URL. */
async function read(file) {
  const name = file.name || "Image";
  let bitmap;
  try {
    bitmap = await createImageBitmap(file); // upright, as the EXIF of a photograph says
  } catch {
    throw new Error(`${name} is not an image that this browser can read.`);
  }
  const scale = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const width = Math.max(1, Math.round(bitmap.width * scale));
  const height = Math.max(1, Math.round(bitmap.height * scale));
  const asItIs = scale === 1 && AS_THEY_ARE.includes(file.type) && file.size <= MOST_BYTES;
  const url = asItIs ? await dataUrl(file) : drawn(bitmap, width, height, file.type);
  const was = scale < 1 ? {width: bitmap.width, height: bitmap.height} : null;
  bitmap.close();
  return {id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, name, width, height, was, url};
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read.`));
    reader.readAsDataURL(file);
  });
}

/** JPEG and WebP stay what they are; others become PNG, or JPEG on white where that is too large. */
function drawn(bitmap, width, height, type) {
  const canvas = element("canvas", {width, height});
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  const url = canvas.toDataURL(AS_THEY_ARE.includes(type) ? type : "image/png", QUALITY);
  if (url.length <= MOST_BYTES) return url;
  context.globalCompositeOperation = "destination-over";
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
