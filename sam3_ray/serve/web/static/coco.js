// What is shown, as a COCO data set that pycocotools reads.

/** COCO from a picture {name, width, height, digest} and groups [{phrase, instances}] as the service gave them. */
export function toCoco(picture, groups, answeredBy) {
  const annotations = [];
  groups.forEach(({ instances }, group) => {
    for (const { score, box_xyxy: [x0, y0, x1, y1], mask_area, mask } of instances) {
      annotations.push({
        id: annotations.length + 1,
        image_id: 1,
        category_id: group + 1,
        bbox: [x0, y0, rounded(x1 - x0), rounded(y1 - y0)],
        area: mask_area,
        segmentation: mask,
        iscrowd: 0,
        score,
      });
    }
  });
  return {
    info: { description: `sam3_ray, ${answeredBy}`, date_created: new Date().toISOString() },
    images: [{ id: 1, file_name: picture.name, width: picture.width, height: picture.height, digest: picture.digest }],
    categories: groups.map(({ phrase }, group) => ({ id: group + 1, name: phrase })),
    annotations,
  };
}

function rounded(value) {
  return Math.round(value * 100) / 100;
}

/** Hand a blob to the user as a file. */
export function saveBlob(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
